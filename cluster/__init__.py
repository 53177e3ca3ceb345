"""Replicas of any phase behind one address, on Ray Serve. Nothing here is imported by a phase."""
