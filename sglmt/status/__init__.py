"""What people and machines are shown: snapshots as data, and pure renderers of them."""
