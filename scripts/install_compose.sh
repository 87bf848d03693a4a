#!/usr/bin/env bash
# Puts Docker Compose 2 into a folder, for machines that have none: `scripts/install_compose.sh DIR`, then
# DIR/docker-compose. Does nothing where it is there.
#
# Debian 12 has version 1.29, which lacks what compose.yaml uses. So the program comes from a newer Debian's package
# (it is one file that needs an old libc only), through the mirror that this machine's apt is configured with; apt's own
# lists stay as they are. Needs a Debian with apt.
set -euo pipefail

readonly DIR=${1:?usage: install_compose.sh DIR} SUITE=trixie

if [ -x "$DIR/docker-compose" ]; then exit 0; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN)' 'Created-By: Packages' | awk '$2 == "Debian" {print $1; exit}')
if [ -z "$mirror" ]; then
  apt-get update -qq
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN)' 'Created-By: Packages' | awk '$2 == "Debian" {print $1; exit}')
fi
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $SUITE main" > "$work/sources.list"
apt() {
  apt-get -qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/nonexistent \
    -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root "$@"
}
apt update
(cd "$work" && apt download docker-compose)
dpkg-deb --fsys-tarfile "$work"/docker-compose_*.deb | tar -C "$work" -x
mkdir -p "$DIR"
mv "$work/usr/libexec/docker/cli-plugins/docker-compose" "$DIR/.docker-compose.$$"
mv "$DIR/.docker-compose.$$" "$DIR/docker-compose"
"$DIR/docker-compose" version
