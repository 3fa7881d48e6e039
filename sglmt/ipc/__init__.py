"""How processes reach each other: typed queues, the socket mapping, the argument segment, the state page."""
