"""Small quantised checkpoints made by the packages that users make theirs with: `scripts/make_quantised_fixtures`."""
