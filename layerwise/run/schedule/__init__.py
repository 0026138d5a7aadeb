"""Schedules: what a rank computes, sends and receives under a plan."""
