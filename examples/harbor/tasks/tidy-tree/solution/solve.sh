#!/bin/bash
cd site
find . -name '*.tmp' -o -name '*.bak' | xargs rm
mkdir styles
find . -name '*.css' -not -path './styles/*' | while read -r file; do mv "$file" styles/; done
ln -s home.html index.html
rmdir cache
