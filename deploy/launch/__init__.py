"""Launchers: what starts and stops backends for the gateways, behind one small HTTP API."""
