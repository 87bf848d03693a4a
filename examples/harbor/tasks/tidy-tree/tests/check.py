import os

found = sorted(
    os.path.relpath(os.path.join(folder, name), "site")
    for folder, folders, names in os.walk("site")
    for name in (*names, *folders)
)
assert found == [
    "home.html",
    "index.html",
    "parts",
    "parts/nav.html",
    "styles",
    "styles/main.css",
    "styles/nav.css",
], found
assert os.readlink("site/index.html") == "home.html"
with open("site/styles/nav.css") as file:
    assert "margin" in file.read()
