"""/v1/files: the files of clients, in a folder that all gateways of a deployment share."""
