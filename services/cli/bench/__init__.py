"""`pageant bench`: how fast a deployment is, under the field's names for it.

serve       an open-loop load generator against a server that runs
offline     a private deployment that gets all requests at once
kernels     the operations of a model's step, one by one
messages    what the messages of a step cost
"""
