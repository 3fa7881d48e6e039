"""The scenarios of `scripts/bench`, by subject. Each module offers `scenarios()`: name → function."""
