"""Measurements that print the figures claimed in the documentation."""
