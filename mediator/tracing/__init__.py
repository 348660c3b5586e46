"""Traces with OpenTelemetry, from a door to the commit and on to the consumer. Only a service that traces loads this.

Everything here hooks onto the service from outside: subclasses of the door, the writer and the encoder of pushes, a
middleware of HTTP, and an observer of the broker. Without it none of them knows of traces.
"""
