#!/bin/bash
for file in notes/*.md; do
  title="# $(basename "$file" .md)"
  if [ "$(head -n 1 "$file")" != "$title" ]; then
    printf '%s\n\n%s\n' "$title" "$(cat "$file")" > "$file.new" && mv "$file.new" "$file"
  fi
done
