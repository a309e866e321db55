"""Workloads and measurements; one module a command."""
