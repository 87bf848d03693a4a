#!/bin/bash
sed -i -e 's/^host = .*/host = 127.0.0.1/' -e 's/^port = .*/port = 8443/' -e 's/^debug = .*/debug = false/' \
  -e 's/^enabled = .*/enabled = yes/' -e 's/^min_version = .*/min_version = 1.2/' server.ini
