"""Engines: the protocol the scheduler drives (`base`) and one small adapter per engine."""
