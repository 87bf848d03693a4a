"""The viewer as it is served: built from ``ui/`` by ``make ui``; never edited by hand."""
