"""What the documents say, held against what there is."""
