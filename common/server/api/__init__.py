"""Endpoints whose body, answer and routes stand in one file."""
