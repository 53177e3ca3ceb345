"""Replicas of any phase behind one address, on Ray Serve. No phase imports this package."""
