"""docs/reference: pages that are generated from the code, one module for each page."""
