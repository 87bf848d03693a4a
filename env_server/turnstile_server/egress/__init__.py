"""The network of sandboxes: an HTTP proxy of the server's, with a listener for each sandbox that may reach hosts.

Sandboxes themselves have no network. Read ``policy`` (what is allowed, when), then ``proxy`` (the listeners) and
``connection`` (one connection, from its request to its end). ``bounds`` has the constants.
"""
