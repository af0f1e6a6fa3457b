"""What a deployment would do: the scheduler's own core and routing, with a model of step time in a worker's place.

It owns virtual time and nothing else: decisions are those of `services.scheduler`, whose pure part it imports, and
workloads and metrics are the same as the load generator's.  It must never know sockets, real clocks or torch.
"""
