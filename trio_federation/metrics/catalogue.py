"""What there is: every family of series, declared once, with its name, labels, text and alert. Collectors are made from
these, and docs/metrics.md is written from `CATALOGUE`. A family's constant is called like the family, without the
project's prefix. Beside them are the words that labels have from the start, and the buckets of the histograms. Where
values come from is in `capacity.py` and `health.py`; nothing here knows prometheus_client."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

#: What is exported at 0 from the start, because it can be known: a rate needs a first value to rise from.
SOURCE_FAILURES = ("collect", "push", "run", "create", "blocked")
SINK_FAILURES = ("update", "run", "create", "troubles", "blocked")
PLACEMENTS = (
    ("local", "local_idle"),
    ("local", "local_growth"),
    ("local", "nothing_anywhere"),
    ("local", "unknown_env"),
    ("local", "forwarded"),
    ("foreign", "foreign_idle"),
    ("foreign", "foreign_growth"),
)
#: What the report of an outcome can come to: the outcome that was told, where it is the first of a placement that is
#: remembered, or why it changes nothing.
OUTCOMES = ("served", "empty", "refused", "repeated", "unknown")
REFUSALS = (
    *("UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"),
    "DEADLINE_EXCEEDED",
)
#: What can come of reading a file again.
RELOADS = ("ok", "failed")

#: Upper bounds, in seconds, of what is counted together in the histograms: from an answer out of memory to more than
#: the deadlines of sources and sinks, which are 10 to 15 s.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0)


class Kind(StrEnum):
    """How a family counts."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


class Family(NamedTuple):
    """One family of series, as it is declared: `name` as in a query (of a histogram without its suffixes), `text`: what
    a value means, also told to Prometheus; `alert`: when to wake somebody, "" where that is seldom right."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str
    alert: str = ""


class Group(NamedTuple):
    """Families that are read together; `text` introduces them."""

    title: str
    text: str
    families: tuple[Family, ...]


_ENV = ("cluster", "namespace", "env", "group")
_MEMBER = ("cluster", "namespace", "env", "pool", "group")
_WHOLE = 'group="" is the whole env.'

ENV_IDLE = Family(
    "agentbox_federation_env_idle",
    Kind.GAUGE,
    _ENV,
    f"Sandboxes of an env that are ready now; {_WHOLE}",
    '`sum by (namespace, env) (agentbox_federation_env_idle{group=""}) == 0` for 5 minutes: no cluster has one ready.',
)
ENV_RUNNING = Family(
    "agentbox_federation_env_running", Kind.GAUGE, _ENV, f"Sandboxes of an env that are in use; {_WHOLE}"
)
ENV_DESIRED = Family("agentbox_federation_env_desired", Kind.GAUGE, _ENV, f"Sandboxes wanted for an env; {_WHOLE}")

MEMBER_IDLE = Family(
    "trio_federation_member_idle", Kind.GAUGE, _MEMBER, "Sandboxes of a member pool that are ready now."
)
MEMBER_RUNNING = Family(
    "trio_federation_member_running", Kind.GAUGE, _MEMBER, "Sandboxes of a member pool that are in use."
)
MEMBER_PENDING = Family(
    "trio_federation_member_pending",
    Kind.GAUGE,
    _MEMBER,
    "Requests that wait for a sandbox of a pool.",
    "`trio_federation_member_pending > 0` for 10 minutes: requests wait, and the pool does not grow.",
)
MEMBER_DESIRED = Family("trio_federation_member_desired", Kind.GAUGE, _MEMBER, "Sandboxes wanted for a member pool.")
MEMBER_HEADROOM = Family(
    "trio_federation_member_headroom",
    Kind.GAUGE,
    _MEMBER,
    "Sandboxes that a pool's autoscaler may still add: +Inf without a ceiling, 0 where it does not autoscale.",
)
MEMBER_AGE_SECONDS = Family(
    "trio_federation_member_age_seconds",
    Kind.GAUGE,
    _MEMBER,
    "Seconds since a member pool's values were last known to be true at their source.",
    "`max by (instance, cluster) (trio_federation_member_age_seconds) > 20`: what is older than `ttl`, 30 s by "
    "default, is gone.",
)

_HUB = ("hub",)
HUB_CONNECTED = Family(
    "trio_federation_hub_connected",
    Kind.GAUGE,
    ("hub", "stream"),
    "1 while this agent's stream to a hub is up, else 0; streams are report and watch.",
    "`max by (instance, stream) (trio_federation_hub_connected) == 0` for 1 minute: the agent is alone. With several "
    "hubs, also `trio_federation_hub_connected == 0` for 10 minutes: one of them is lost.",
)
HUB_RECONNECTS_TOTAL = Family(
    "trio_federation_hub_reconnects_total",
    Kind.COUNTER,
    _HUB,
    "Times that the connection to a hub was opened again after one that had worked broke.",
    "`increase(trio_federation_hub_reconnects_total[15m]) > 5`: a network, a proxy or a hub that does not hold.",
)
HUB_LAST_BATCH_AGE_SECONDS = Family(
    "trio_federation_hub_last_batch_age_seconds",
    Kind.GAUGE,
    _HUB,
    "Seconds since a hub last sent a batch of records; absent until there was one.",
    "`min by (instance) (trio_federation_hub_last_batch_age_seconds) > 30` where others report: what is known of them "
    "runs out.",
)
HUB_BATCH_WAIT_SECONDS = Family(
    "trio_federation_hub_batch_wait_seconds",
    Kind.HISTOGRAM,
    _HUB,
    "Seconds that batches of a hub, its signs of life included, were on their way longer than the quickest of late: "
    "in buffers, in the network, in a process that stood still. They count as age of what a batch tells.",
    "`histogram_quantile(0.99, sum by (le, instance) (rate(trio_federation_hub_batch_wait_seconds_bucket[5m]))) > 5`: "
    "this agent, the way to its hub, or the hub is too slow for what there is to tell.",
)
HUB_RECEIVED_RECORDS_TOTAL = Family(
    "trio_federation_hub_received_records_total",
    Kind.COUNTER,
    _HUB,
    "Records and withdrawals that came from a hub, refused ones included.",
)
HUB_REPORTED_RECORDS_TOTAL = Family(
    "trio_federation_hub_reported_records_total",
    Kind.COUNTER,
    _HUB,
    "Records and withdrawals that were reported to a hub.",
    "`rate(trio_federation_hub_reported_records_total[2m]) == 0` of an agent with sources: others lose sight of it.",
)
HUB_SENT_BYTES_TOTAL = Family(
    "trio_federation_hub_sent_bytes_total", Kind.COUNTER, _HUB, "Bytes that were sent to a hub, before encryption."
)
HUB_RECEIVED_BYTES_TOTAL = Family(
    "trio_federation_hub_received_bytes_total",
    Kind.COUNTER,
    _HUB,
    "Bytes that were received from a hub, after decryption.",
)

_SOURCE = ("source",)
SOURCE_LIVE = Family(
    "trio_federation_source_live",
    Kind.GAUGE,
    _SOURCE,
    "1 while a capacity source works and vouches for what it says, else 0.",
    "`trio_federation_source_live == 0` for 1 minute: its records are not refreshed, and run out.",
)
SOURCE_TROUBLE = Family(
    "trio_federation_source_trouble",
    Kind.GAUGE,
    ("source", "reason"),
    "1 while something keeps a source from telling everything, by the source's own word for it, whoever else is "
    "involved; absent until it did.",
    "`trio_federation_source_trouble == 1` for 5 minutes: part of what it should tell is missing, or runs out.",
)
SOURCE_LAST_SUCCESS_AGE_SECONDS = Family(
    "trio_federation_source_last_success_age_seconds",
    Kind.GAUGE,
    _SOURCE,
    "Seconds since a source last said all that it has; absent until it did.",
    "`trio_federation_source_last_success_age_seconds > 20`: its records run out at `ttl`, 30 s by default.",
)
SOURCE_RECORDS = Family(
    "trio_federation_source_records",
    Kind.GAUGE,
    _SOURCE,
    "Records that a source has told when it last said all that it has; absent until it did.",
    "`trio_federation_source_records == 0` where there are pools: the source looks in the wrong place.",
)
SOURCE_FAILURES_TOTAL = Family(
    "trio_federation_source_failures_total",
    Kind.COUNTER,
    ("source", "kind"),
    "Failures of a source, by what failed: collect, push, run, create, or blocked, when it did not give way.",
    "`increase(trio_federation_source_failures_total[10m]) > 3`: it fails again and again.",
)
SOURCE_COLLECT_DURATION_SECONDS = Family(
    "trio_federation_source_collect_duration_seconds",
    Kind.HISTOGRAM,
    _SOURCE,
    "Seconds that a source took to say all that it has, where it did.",
    "`histogram_quantile(0.9, rate(trio_federation_source_collect_duration_seconds_bucket[10m])) > 5`: it is slow, and "
    "given up at half of `ttl`.",
)

_SINK = ("sink",)
SINK_TROUBLE = Family(
    "trio_federation_sink_trouble",
    Kind.GAUGE,
    ("sink", "reason", "party"),
    "1 while something keeps a sink from showing everything, by the sink's own word for it, and by who else is "
    'involved, where somebody is; absent until it did. Of each reason, parties after the first 20 are party="other".',
    "`max by (instance, sink, reason) (trio_federation_sink_trouble) == 1` for 5 minutes: part of what it should show "
    "is missing, or stale.",
)
SINK_LAST_SUCCESS_AGE_SECONDS = Family(
    "trio_federation_sink_last_success_age_seconds",
    Kind.GAUGE,
    _SINK,
    "Seconds since a sink last took what it was told; absent until it did. It is told when something has changed.",
)
SINK_UPDATE_DURATION_SECONDS = Family(
    "trio_federation_sink_update_duration_seconds",
    Kind.HISTOGRAM,
    _SINK,
    "Seconds that a sink took to take what it was told, where it did.",
)
SINK_FAILURES_TOTAL = Family(
    "trio_federation_sink_failures_total",
    Kind.COUNTER,
    ("sink", "kind"),
    "Failures of a sink, by what failed: update, run, create, troubles, when it could not say what troubles it, or "
    "blocked, when it did not give way.",
    "`increase(trio_federation_sink_failures_total[10m]) > 3`: what it mirrors is stale.",
)
_FILTER = ("filter",)
FILTER_FAILURES_TOTAL = Family(
    "trio_federation_filter_failures_total",
    Kind.COUNTER,
    _FILTER,
    "Records on which a report filter failed, each time that it did.",
    "`increase(trio_federation_filter_failures_total[10m]) > 0`: those records are not reported anew.",
)
FILTER_WITHHELD_RECORDS_TOTAL = Family(
    "trio_federation_filter_withheld_records_total",
    Kind.COUNTER,
    _FILTER,
    "Records that a report filter kept from others, each time that it did.",
)

PLACEMENTS_TOTAL = Family(
    "trio_federation_placements_total",
    Kind.COUNTER,
    ("outcome", "rule"),
    "Creates that were placed, by outcome, local or foreign, and by the rule that decided: local_idle, local_growth, "
    "nothing_anywhere, unknown_env, forwarded, foreign_idle, foreign_growth.",
    '`rate(trio_federation_placements_total{rule="nothing_anywhere"}[5m]) > 0` for 5 minutes: creates wait, and no '
    "cluster has room.",
)
PLACEMENT_OUTCOMES_TOTAL = Family(
    "trio_federation_placement_outcomes_total",
    Kind.COUNTER,
    ("outcome",),
    "Reports of what became of creates that were placed: served, empty or refused, the first report of each; repeated, "
    "later ones of the same placement, and unknown, those of a placement that is not remembered, which change nothing.",
    '`sum by (instance) (rate(trio_federation_placement_outcomes_total{outcome=~"empty|refused"}[10m])) / sum by '
    '(instance) (rate(trio_federation_placement_outcomes_total{outcome=~"served|empty|refused"}[10m])) > 0.05` for 10 '
    "minutes: pools are found empty although they looked well; what is known of them is too old, or somebody places "
    "there without a reservation.",
)
PLACEMENT_RESERVATIONS = Family(
    "trio_federation_placement_reservations",
    Kind.GAUGE,
    (),
    "Creates that were placed and still count against where they went: no placement has met a report that shows them "
    "yet, and they have not run out.",
)

REGISTRY_RECORDS = Family(
    "trio_federation_registry_records",
    Kind.GAUGE,
    (),
    "Records that count now: fresh, and not shadowed by more exact ones.",
)
REGISTRY_HELD_RECORDS = Family(
    "trio_federation_registry_held_records",
    Kind.GAUGE,
    (),
    "Records in memory: also shadowed ones, and those that have run out and are not freed yet.",
    "It grows, and trio_federation_registry_records does not, for an hour: a leak, please report it.",
)
REGISTRY_TOMBSTONES = Family(
    "trio_federation_registry_tombstones",
    Kind.GAUGE,
    (),
    "Withdrawn records that are remembered for a while, so that an older copy does not bring them back.",
)
REGISTRY_INSTANCES = Family(
    "trio_federation_registry_instances", Kind.GAUGE, (), "Clusters of which the agent that reports is known."
)
RECORDS_DROPPED_TOTAL = Family(
    "trio_federation_records_dropped_total",
    Kind.COUNTER,
    ("origin", "reason"),
    "Capacity records that were refused, by where they came from (source:NAME, hub:HOST:PORT, cluster:ID) and why: the "
    "field that breaks a rule, or a fixed word.",
    "`increase(trio_federation_records_dropped_total[10m]) > 0`: somebody sends what breaks a rule; the log has an "
    "example of each.",
)
QUEUE_DEPTH = Family(
    "trio_federation_queue_depth",
    Kind.GAUGE,
    ("queue",),
    "Batches or changes that wait in a queue now.",
    'At a queue\'s bound (docs/design.md, "Data, on its way") for 1 minute: whoever empties it is stuck or too slow.',
)
QUEUE_CONFLATIONS_TOTAL = Family(
    "trio_federation_queue_conflations_total",
    Kind.COUNTER,
    ("queue",),
    "Changes that gave way to a newer one of the same record while they waited; nothing is lost by that.",
)

HUB_WATCHERS = Family("trio_federation_hub_watchers", Kind.GAUGE, (), "Agents that watch this hub now.")
HUB_REPORTERS = Family(
    "trio_federation_hub_reporters",
    Kind.GAUGE,
    (),
    "Agents that report to this hub now.",
    "Fewer than there are clusters, for 5 minutes.",
)
HUB_CALLS_REFUSED_TOTAL = Family(
    "trio_federation_hub_calls_refused_total",
    Kind.COUNTER,
    ("status",),
    "Calls that this hub refused, by gRPC status.",
    "`increase(trio_federation_hub_calls_refused_total[10m]) > 0`: a wrong credential or cluster id, two agents that "
    "report for one cluster, or a peer over its limits; the log has the cluster.",
)
HUB_HANDSHAKES_FAILED_TOTAL = Family(
    "trio_federation_hub_handshakes_failed_total",
    Kind.COUNTER,
    (),
    "TLS handshakes with this hub that failed: a certificate that is missing, has run out or comes from elsewhere, a "
    "peer that trusts another authority, or no TLS at all.",
    "`increase(trio_federation_hub_handshakes_failed_total[10m]) > 0` where nobody scans the port: an agent is not let "
    "in, or does not trust the hub; the log has the address.",
)
HUB_CONNECTIONS_CUT_TOTAL = Family(
    "trio_federation_hub_connections_cut_total",
    Kind.COUNTER,
    ("reason",),
    "Connections that this hub ended because of what their peer did: protocol (it broke HTTP/2, or does not speak it), "
    "flood (frames that carry nothing), silent (nothing for silence_limit), stalled (does not take what it is sent), "
    "no_call (no call that was let in for first_message), late (what it tells was on its way for the whole ttl).",
    '`increase(trio_federation_hub_connections_cut_total{reason=~"protocol|flood"}[10m]) > 0` where nobody scans the '
    "port; silent and stalled for many agents at once: the network, or this hub itself. The log has the address.",
)
HUB_REPORTERS_BY_CREDENTIAL = Family(
    "trio_federation_hub_reporters_by_credential",
    Kind.GAUGE,
    ("credential",),
    "Agents that report to this hub now, by what has proven them, as [hub] accept has it: shared, token, certificate, "
    "or two of them together.",
    '`trio_federation_hub_reporters_by_credential{credential="shared"} > 0` once every agent should have a token or a '
    "certificate.",
)
HUB_POLICY_BREACHES_TOTAL = Family(
    "trio_federation_hub_policy_breaches_total",
    Kind.COUNTER,
    ("cluster", "reason"),
    "Records that broke a rule of [[hub.policy]], by cluster and by what became of them: env_not_allowed and "
    "too_many_records, which were dropped, and idle_cut, whose idle was cut to the highest that counts.",
    "`increase(trio_federation_hub_policy_breaches_total[10m]) > 0`: a cluster says more than it may; the log has an "
    "example of each.",
)

CERTIFICATE_EXPIRES_TIMESTAMP_SECONDS = Family(
    "trio_federation_certificate_expires_timestamp_seconds",
    Kind.GAUGE,
    ("certificate",),
    "Seconds from 1970 to when the first certificate of a file runs out; certificate is the file's key in the "
    "configuration, such as hub.tls.cert_file.",
    "`trio_federation_certificate_expires_timestamp_seconds - time() < 14 * 86400`: renew it; the file is read again "
    "by itself.",
)
RELOADS_TOTAL = Family(
    "trio_federation_reloads_total",
    Kind.COUNTER,
    ("what", "outcome"),
    "Times that files had changed and were read again, by what they are for and by outcome: ok, or failed, with what "
    "was there before kept; counted at every look while it fails, but for the first.",
    '`increase(trio_federation_reloads_total{outcome="failed"}[10m]) > 0`: what is in the file cannot be used; the log '
    "says why.",
)

LOG_LINES_LOST_TOTAL = Family(
    "trio_federation_log_lines_lost_total",
    Kind.COUNTER,
    (),
    "Lines of the log that could not be written, on a full disk for instance.",
    "`increase(trio_federation_log_lines_lost_total[10m]) > 0`: the log has holes; make room, or mend its reader.",
)
BUILD_INFO = Family(
    "trio_federation_build_info",
    Kind.INFO,
    ("version", "python", "trio", "grpclib"),
    "1, with the versions of this program, of Python and of the libraries under it as labels.",
)
PLUGIN_FAILURES = Family(
    "trio_federation_plugin_failures",
    Kind.GAUGE,
    ("plugin", "package"),
    "Things that an installed plugin got wrong when it was loaded; `trio-federation plugins` tells what.",
    "`> 0`: it cannot be used, or only in part.",
)
UPTIME_SECONDS = Family(
    "trio_federation_uptime_seconds",
    Kind.GAUGE,
    (),
    "Seconds since this agent or hub was started.",
    "`resets(trio_federation_uptime_seconds[1h]) > 3`: it is restarted again and again.",
)

#: Everything that is ever exported, in the order of docs/metrics.md.
CATALOGUE = (
    Group(
        "Capacity of an env",
        "What each cluster has of each env, the own one included: one series for each scaling group, and one for the "
        "whole env. A series is gone with its records: nothing here keeps the last value of what has vanished.",
        (ENV_IDLE, ENV_RUNNING, ENV_DESIRED),
    ),
    Group(
        "Member pools",
        "What each pool of each cluster has. Clusters that tell no pools, only sums, are in the table above alone.",
        (MEMBER_IDLE, MEMBER_RUNNING, MEMBER_PENDING, MEMBER_DESIRED, MEMBER_HEADROOM, MEMBER_AGE_SECONDS),
    ),
    Group(
        "Hubs, as an agent sees them",
        "Label hub is host:port as the configuration has it.",
        (
            HUB_CONNECTED,
            HUB_RECONNECTS_TOTAL,
            HUB_LAST_BATCH_AGE_SECONDS,
            HUB_BATCH_WAIT_SECONDS,
            HUB_RECEIVED_RECORDS_TOTAL,
            HUB_REPORTED_RECORDS_TOTAL,
            HUB_RECEIVED_BYTES_TOTAL,
            HUB_SENT_BYTES_TOTAL,
        ),
    ),
    Group(
        "Sources",
        "Label source is the place in the configuration and the type, as in the log: source[0]:fixtures.",
        (
            SOURCE_LIVE,
            SOURCE_TROUBLE,
            SOURCE_LAST_SUCCESS_AGE_SECONDS,
            SOURCE_RECORDS,
            SOURCE_FAILURES_TOTAL,
            SOURCE_COLLECT_DURATION_SECONDS,
        ),
    ),
    Group(
        "Sinks and filters",
        "Labels sink and filter are named like sources.",
        (
            SINK_TROUBLE,
            SINK_LAST_SUCCESS_AGE_SECONDS,
            SINK_UPDATE_DURATION_SECONDS,
            SINK_FAILURES_TOTAL,
            FILTER_FAILURES_TOTAL,
            FILTER_WITHHELD_RECORDS_TOTAL,
        ),
    ),
    Group(
        "Placements",
        "Where creates were sent, and why, and what became of them, as far as it was reported.",
        (PLACEMENTS_TOTAL, PLACEMENT_OUTCOMES_TOTAL, PLACEMENT_RESERVATIONS),
    ),
    Group(
        "Registry and queues",
        "What is held, what waits, and what was refused. Of a process that is a hub and no agent, the registry is what "
        "the hub holds.",
        (
            REGISTRY_RECORDS,
            REGISTRY_HELD_RECORDS,
            REGISTRY_TOMBSTONES,
            REGISTRY_INSTANCES,
            RECORDS_DROPPED_TOTAL,
            QUEUE_DEPTH,
            QUEUE_CONFLATIONS_TOTAL,
        ),
    ),
    Group(
        "Hub side",
        "Of a process that is a hub, and of no other.",
        (
            HUB_WATCHERS,
            HUB_REPORTERS,
            HUB_REPORTERS_BY_CREDENTIAL,
            HUB_HANDSHAKES_FAILED_TOTAL,
            HUB_CONNECTIONS_CUT_TOTAL,
            HUB_CALLS_REFUSED_TOTAL,
            HUB_POLICY_BREACHES_TOTAL,
        ),
    ),
    Group(
        "Certificates and files",
        "Of every process whose configuration names such files: certificates, keys, secrets, the deny list.",
        (CERTIFICATE_EXPIRES_TIMESTAMP_SECONDS, RELOADS_TOTAL),
    ),
    Group(
        "Build",
        "Which program this is, for how long it runs, and what of its log is missing.",
        (BUILD_INFO, PLUGIN_FAILURES, UPTIME_SECONDS, LOG_LINES_LOST_TOTAL),
    ),
)
