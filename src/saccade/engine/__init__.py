"""Answers one batch of requests, requests that come and go, and conversations."""
