#!/usr/bin/env bash
# Makes the Docker image TAG from Debian packages, where no registry of images can be reached:
#
#     scripts/sandbox_image.sh TAG     then TURNSTILE_SANDBOXES__DOCKER_IMAGE=TAG turnstile serve …
#     scripts/sandbox_image.sh TAG python3-venv libstdc++6     with more packages: a base for server/Dockerfile
#
# Python 3 with its standard library, bash, and BusyBox for the other commands: about 50 MB in a few seconds. It has
# no pip and no git. Does nothing when TAG exists. Needs a Debian or Ubuntu with apt, and a Docker engine.
#
# The packages are unpacked, not installed: none of their scripts run, so this takes no root rights and no chroot.
set -euo pipefail

readonly TAG=${1:?usage: sandbox_image.sh TAG [PACKAGE…]}
readonly ROOTS=(python3-minimal python3 bash busybox-static ca-certificates tzdata "${@:2}")
# What those depend on only to be configured, and what BusyBox stands in for.
readonly LEFT_OUT=' debconf debconf-2.0 dpkg perl-base tar openssl base-files debianutils '

if docker image inspect "$TAG" > /dev/null 2>&1; then
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir packages root

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi
}
if ! apt-cache show busybox-static > /dev/null 2>&1; then
  as_root apt-get update -qq
fi

# The first of alternatives, names without an architecture, nothing virtual.
depends() {
  apt-cache depends --important --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances "$@" | awk '
      /^ [ |](Pre)?Depends: / && !alternative { if ($2 !~ /^</) { sub(/:.*/, "", $2); print $2 } }
      { alternative = /^ [|]/ }'
}

declare -A wanted=()
frontier=("${ROOTS[@]}")
while [ ${#frontier[@]} -gt 0 ]; do
  for package in "${frontier[@]}"; do wanted[$package]=1; done
  found=()
  for package in $(depends "${frontier[@]}" | sort -u); do
    if [ -z "${wanted[$package]:-}" ] && [[ $LEFT_OUT != *" $package "* ]]; then found+=("$package"); fi
  done
  frontier=("${found[@]}")
done

# One name that this release lacks would stop the rest; a shown package can be fetched.
(cd packages && apt-get download -qq -o APT::Sandbox::User=root \
  $(apt-cache show --no-all-versions "${!wanted[@]}" | awk '/^Package: / {print $2}' | sort -u))
for package in packages/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar --extract --directory root --no-same-owner
done

cd root
rm -rf usr/share/doc usr/share/man usr/share/info usr/share/lintian usr/share/locale usr/share/perl5
# One tree: packages of releases before the merge of /bin into /usr/bin lie in both.
for folder in bin sbin lib lib64; do
  if [ ! -L "$folder" ]; then
    mkdir -p "usr/$folder"
    if [ -d "$folder" ]; then cp -a "$folder/." "usr/$folder/" && rm -rf "$folder"; fi
    ln -s "usr/$folder" "$folder"
  fi
done
for applet in $(./usr/bin/busybox --list); do
  [ -e "usr/bin/$applet" ] || ln -s busybox "usr/bin/$applet"
done
[ -e usr/bin/python3 ] || ln -s "$(basename usr/bin/python3.[0-9]*[0-9])" usr/bin/python3
mkdir -p tmp root home proc sys dev etc/ssl/certs
chmod 1777 tmp
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n' > etc/passwd
printf 'root:x:0:\nnogroup:x:65534:\n' > etc/group
if [ -r /etc/ssl/certs/ca-certificates.crt ]; then cp /etc/ssl/certs/ca-certificates.crt etc/ssl/certs/; fi

tar --create --owner=0 --group=0 --numeric-owner . | docker import \
  --change 'CMD ["/bin/sh"]' --change 'ENV PATH=/usr/local/bin:/usr/bin:/bin' \
  --change 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' - "$TAG" > /dev/null
printf 'sandbox_image: made %s, %s MB\n' "$TAG" "$(du -sm . | cut -f1)" >&2
