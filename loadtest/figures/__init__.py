"""The record of a request, and the figures of many. Pure."""
