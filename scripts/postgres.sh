#!/bin/sh
# Installs Postgres where its programs are missing. Needs Debian or Ubuntu, and root or sudo; on other
# systems it says what to do.
set -eu

for dir in $(echo "$PATH" | tr : ' ') /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /usr/local/pgsql/bin \
	/opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin; do
	if [ -x "$dir/initdb" ] && [ -x "$dir/postgres" ]; then
		exit 0
	fi
done

if ! command -v apt-get >/dev/null; then
	echo "Postgres is not installed: install it with your system's package manager (for example: brew install postgresql@17)." >&2
	exit 1
fi
as_root=
if [ "$(id -u)" -ne 0 ]; then
	as_root=sudo
fi
echo "Postgres is not installed; installing Debian's package" >&2
$as_root apt-get update -q >&2
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends postgresql >&2
