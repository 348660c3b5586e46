"""Tenants: those of the settings and those made while the service runs, their users, API tokens and quotas (A6, S7)."""
