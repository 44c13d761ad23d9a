// etcd as its own main package would start it: the module that holds that package cannot be required by another.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
