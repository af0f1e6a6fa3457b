"""Whether requests can be served, and how loaded the deployment is."""
