"""Answers: one call's, requests that come and go, conversations."""
