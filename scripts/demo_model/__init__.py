"""Trains the bundled story model and its draft: python -m scripts.demo_model --help"""
