"""Sandboxes as pods of one Kubernetes namespace.

Read ``backend`` first, then ``pods`` (a sandbox as a Pod object) and ``pod_ends`` (why a pod does not start, what
ended it), ``namespace_policy`` (the network is shut, and that is tried), ``object_watch`` (pods as they change),
``claims`` and ``warm_pods`` (pods that are there before: agent-sandbox), and the API: ``cluster_access`` (address
and credentials), ``cluster_api`` (requests), ``pod_stream`` (attach).
"""
