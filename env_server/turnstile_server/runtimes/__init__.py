"""The carried runtime: a Python with libraries and a loader of its own, for images that have none of it.

It is made once from the server's own interpreter and mounted read-only into containers, always at one path. Its
programs start there whatever the image is: no Python, another one, musl, or a shell alone.

In reading order:

- ``layout``: the paths inside, which are part of the format.
- ``elf``: reads and edits ELF files in place.
- ``source``: the interpreter that a runtime is made of, and whether one can be made on this machine.
- ``build``: fills a folder with the runtime.
- ``adapt``: programs of agents, made to start by the runtime's loader.
- ``install_folder``: folders that appear whole or not at all.
- ``store``: the runtime of this server, made where it is missing.
"""
