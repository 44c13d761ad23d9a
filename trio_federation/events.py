"""Every event that this project logs, by name: how loud it is, what it says, what comes with it, and what to do about
it. docs/logs.md is written from here; a test holds the calls in the code against it. Plain data: who logs what, and
when, is each room's own business."""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """One kind of line in the log."""

    #: "debug", "info", "warning" or "error": the level of its first line; repetitions are logged at debug
    level: str
    #: what it says
    meaning: str
    #: what comes with it, by key; a key with "?" is there only sometimes
    keys: tuple[str, ...]
    #: what to do; "" where there is nothing to be done
    advice: str = ""


#: What the summary of a failure that goes on has besides.
_SUMMED = ("failures?", "for_seconds?")

#: By the process's parts, and there by name.
EVENTS: dict[str, dict[str, Event]] = {
    "The process": {
        "log_lines_lost": Event(
            "error",
            "So many lines before this one could not be written, and are lost; nothing else is. They are counted in "
            "`trio_federation_log_lines_lost_total`.",
            ("lines", "error"),
            "See the error: a full disk, or a reader of the log that has gone.",
        ),
        "started": Event(
            "info",
            "Everything that the configuration asks for runs, on these ports.",
            ("cluster", "hubs", "hub_bind", "hub_ports", "metrics_port", "admin_port"),
        ),
        "stopping": Event("info", "A signal has come; records are withdrawn, and then everything ends.", ("signal",)),
        "configuration": Event(
            "warning",
            "Something in the configuration is allowed, and yet should be known.",
            ("note",),
            "Read the note; `trio-federation check` shows it, too.",
        ),
        "reloaded": Event("info", "Files that have changed were read again, and count from now on.", ("what",)),
        "reload_failed": Event(
            "warning",
            "Files have changed, and cannot be used as they are now; what was there before still counts. Told once for "
            "each fault, when two looks in a row have found it; tried again every two seconds.",
            ("what", "error"),
            "See the error. `trio_federation_reloads_total` counts them.",
        ),
        "certificate_expires": Event(
            "warning",
            "A certificate runs out within 30 days, 7 days or a day, or has run out; told once for each of these, and "
            "daily in the end.",
            ("certificate", "file", "subject", "days_left"),
            "Renew it, and replace the file; it is read again by itself.",
        ),
        "single_cluster": Event(
            "info",
            "The agent takes part in no federation: it has no cluster id, no hub or no credential.",
            ("cluster",),
            "Nothing, if that is meant; else see `configuration` above it.",
        ),
    },
    "Hubs, seen from an agent": {
        "hub_works": Event(
            "info", "A call to a hub, `report` or `watch`, is open and accepted.", ("hub", "call", "failures_before")
        ),
        "hub_failed": Event(
            "warning",
            "The connection to a hub, or a call on it, has failed; it is tried again. A line for the first failure of"
            " a "
            "kind, and a summary ever more rarely while it goes on.",
            ("hub", "call", "error", "retry_in", *_SUMMED),
            "See the error: address, certificate, secret, cluster id; and whether the hub runs.",
        ),
        "cluster_uids_differ": Event(
            "warning",
            "Two sources say that they read different clusters. The first one's word is told to the hubs.",
            ("source", "other"),
            "Let each agent read one cluster; see [[source]].",
        ),
        "hub_is_older": Event(
            "warning",
            "A hub does not know the call: it is an older version. Tried again every five minutes.",
            ("hub", "call", "error", "retry_in"),
            "Update the hub.",
        ),
        "hub_forbids_pings": Event(
            "warning",
            "A hub has closed the connection because of too many pings; they become rarer. Told once for each hub.",
            ("hub", "keepalive", "silence_limit"),
            "Raise [federation] keepalive, or what stands before the hub allows.",
        ),
        "record_dropped": Event(
            "warning",
            "A record was refused: it breaks a rule on names, ranges or whose it is. Told once for each origin and "
            "reason; "
            "all of them are counted in `trio_federation_records_dropped_total`.",
            ("origin?", "cluster?", "reason", "detail", "told"),
            "Mend the source, or the peer, that sends it.",
        ),
    },
    "Plugins": {
        "plugin_failed": Event(
            "warning",
            "An installed plugin could not be loaded, or offers something unusable; the others go on.",
            ("plugin", "package", "error"),
            "`trio-federation plugins` shows all of it.",
        ),
        "source_failed": Event(
            "warning",
            "A source could not be made (`create`), run (`run`), asked (`collect`) or listened to (`push`), or holds "
            "its "
            "thread (`blocked`). What is known of it stays until it is older than the TTL; it is tried again after a "
            "backoff.",
            ("source", "what", "error", "records", *_SUMMED),
            "See the error; `/readyz` says when it is tried next.",
        ),
        "source_not_live": Event(
            "warning",
            "A source that pushes says that it cannot vouch for what it has pushed.",
            ("source", "what", "error", "records", *_SUMMED),
            "See what the source itself logs.",
        ),
        "source_trouble": Event(
            "warning",
            "A source goes on, but something keeps it from telling everything.",
            ("source", "what", "error", "reasons", "parties?", "records", *_SUMMED),
            "See the error. What it cannot vouch for ages out; the rest is told as ever.",
        ),
        "source_works": Event(
            "info", "What had failed of a source works again.", ("source", "what", "failures_before")
        ),
        "filter_failed": Event(
            "warning",
            "A filter has failed on a record of a source. That record is not reported anew, and ages out elsewhere.",
            ("source", "filter", "what", "error", "records", *_SUMMED),
            "Mend the filter.",
        ),
        "sink_failed": Event(
            "warning",
            "A sink could not be made (`create`), run (`run`), told (`update`) or asked what troubles it (`troubles`), "
            "or holds its thread (`blocked`).",
            ("sink", "what", "error", *_SUMMED),
            "See the error.",
        ),
        "sink_trouble": Event(
            "warning",
            "A sink goes on, but something keeps it from showing everything; `parties` says who else is involved.",
            ("sink", "what", "error", "reasons", "parties?", *_SUMMED),
            "See the error. It is told as ever, and tries by itself to get over it.",
        ),
        "sink_works": Event("info", "What had failed of a sink works again.", ("sink", "what", "failures_before")),
        "close_failed": Event(
            "warning", "A source or sink could not let go of what it holds, or not in time.", ("plugin", "error")
        ),
        "plugin_abandoned": Event(
            "warning",
            "A source or sink did not end when it was stopped; its thread is left to itself.",
            ("source?", "sink?", "error"),
            "Have it await, or use a thread for what blocks.",
        ),
    },
    "Placements": {
        "placed": Event(
            "debug",
            "A create was placed: where, by which rule, and what became of each candidate.",
            ("id", "namespace", "env", "group", "target", "rule", "reason", "candidates"),
        ),
        "asked": Event(
            "debug",
            "Somebody asked where a create would go; nothing is reserved.",
            ("id", "namespace", "env", "group", "target", "rule", "reason", "candidates"),
        ),
        "outcome": Event(
            "debug",
            "What became of a create was reported: `served`, `empty` or `refused`; or `repeated`, of one of which that "
            "was known already, or `unknown`, of a placement that is not remembered, which both change nothing.",
            ("id", "outcome", "target"),
        ),
    },
    "The hub": {
        "reporter_came": Event(
            "info",
            "An agent reports from now on. `credential` is what has proven it.",
            ("cluster", "instance", "peer", "credential"),
        ),
        "reporter_left": Event(
            "info",
            "A report has ended: with a goodbye, replaced by a newer call, or lost.",
            ("cluster", "peer", "said_goodbye", "replaced"),
        ),
        "watcher_came": Event("info", "An agent watches from now on.", ("cluster", "peer", "credential")),
        "watcher_left": Event(
            "info",
            "A watch has ended; `conflated` changes had been replaced by newer ones while it was slow.",
            ("cluster", "peer", "conflated"),
        ),
        "call_refused": Event(
            "info",
            "A call was refused. A line for the first of its kind.",
            ("cluster", "peer", "status", "error"),
            "UNAUTHENTICATED, PERMISSION_DENIED: see its credential. ALREADY_EXISTS: two agents use one cluster id, or "
            "one cluster has two. RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED: see [hub.limits].",
        ),
        "call_ended": Event(
            "info",
            "A call that was open was ended by this hub: what has proven it is on the deny list now, or the peer went "
            "over a limit.",
            ("cluster", "peer", "status", "error"),
        ),
        "credential_mixed_up": Event(
            "warning",
            "A call has sent a token where only the shared secret counts, or the hub's own secret where only tokens or "
            "certificates do, also where something else lets it in. Told once for each cluster.",
            ("cluster", "peer", "error"),
            "Give the agent what the error says.",
        ),
        "policy_breach": Event(
            "warning",
            "A cluster has reported what [[hub.policy]] does not allow; it was dropped, or cut. Told once for each "
            "cluster and reason; all of them are counted in `trio_federation_hub_policy_breaches_total`.",
            ("cluster", "reason", "detail", "told"),
            "Mend what the agent reports, or the policy.",
        ),
        "deny_line_ignored": Event(
            "warning",
            "A line of the deny list cannot be read, and denies nobody; the other lines count.",
            ("file", "error"),
            "Mend the line: CLUSTER, or CLUSTER.SERIAL.",
        ),
        "connection_refused": Event(
            "warning",
            "An address has as many connections open as one may have; the next ones are refused. Told once a minute.",
            ("peer", "connections"),
            "See what connects from there, or raise [hub.limits] connections.",
        ),
        "handshake_failed": Event(
            "info",
            "A TLS handshake has failed. A line for the first of its kind from an address; all of them are counted in "
            "`trio_federation_hub_handshakes_failed_total`.",
            ("peer", "error"),
            "See the error; port scanners cause it, too.",
        ),
        "connection_cut": Event(
            "info",
            "This hub has ended a connection because of what its peer did. A line for the first of its kind from an "
            "address; all of them are counted in `trio_federation_hub_connections_cut_total`.",
            ("peer", "reason", "error"),
            "See the reason there; an agent whose network or process stood still is silent or stalled, and comes back.",
        ),
        "connection_ended": Event("debug", "A connection to this hub has ended, and why.", ("peer", "reason")),
    },
    "HTTP": {
        "answer_failed": Event(
            "error",
            "What was asked for could not be written; it is answered with 500 until it can.",
            ("what", "error"),
            "A fault of ours: please report it.",
        ),
        "answer_works": Event("info", "It can be written again.", ("what",)),
        "http_answer_failed": Event(
            "error", "A request has met a fault of ours.", ("server", "path"), "Please report it."
        ),
        "http_connection_failed": Event(
            "warning",
            "An HTTP connection has failed and was closed; the others go on. One line a minute at most; `more` failed "
            "since the last one.",
            ("server", "error", "more?"),
        ),
    },
    "Faults of ours": {
        "connection_failed": Event(
            "error", "A connection to this hub has met a fault of ours.", ("peer",), "Please report it."
        ),
        "handler_failed_late": Event(
            "error", "A call has met a fault of ours after its end.", ("peer",), "Please report it."
        ),
        "stray_asyncio_error": Event(
            "error",
            "asyncio, under the gRPC library, has met an error that nobody took.",
            ("message",),
            "Please report it.",
        ),
    },
}
