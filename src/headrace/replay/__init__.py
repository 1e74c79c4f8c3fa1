"""Recorded rollouts, looked at and checked."""
