#!/bin/sh
# Makes a CA, once, and a certificate for each broker: make-certificates.sh DIR NAME...
#
#   DIR/ca.pem, DIR/ca.key            give ca.pem to `coordinator start --broker-ca`; keep ca.key away from the brokers
#   DIR/NAME.pem, DIR/NAME.key        P-256, for TLS both ways, because the brokers of a cluster also connect to each other
#
# A NAME is what devices connect to: a host name or an IP address; each certificate is for localhost as well.
# Certificates end after 100 years: a device that renews nothing must not end before its board does.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: $0 DIR NAME..." >&2
    exit 2
fi
folder=$1
shift
umask 077
mkdir -p "$folder"

new_key() {
    openssl ecparam -name prime256v1 -genkey -noout -out "$1"
}

if [ ! -e "$folder/ca.pem" ]; then
    new_key "$folder/ca.key"
    openssl req -x509 -new -key "$folder/ca.key" -sha256 -days 36500 -subj "/CN=fedfit brokers" \
        -addext "keyUsage=critical,keyCertSign,cRLSign" -out "$folder/ca.pem"
fi
for name; do
    case "$name" in
        *[!0-9.:a-fA-F]* | *[g-zG-Z]*) kind=DNS ;;
        *[.:]*) kind=IP ;;
        *) kind=DNS ;;
    esac
    new_key "$folder/$name.key"
    openssl req -new -key "$folder/$name.key" -subj "/CN=$name" -out "$folder/$name.csr"
    cat > "$folder/$name.ext" <<END
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth,clientAuth
subjectAltName=$kind:$name,DNS:localhost,IP:127.0.0.1
END
    openssl x509 -req -in "$folder/$name.csr" -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -CAcreateserial -sha256 \
        -days 36500 -extfile "$folder/$name.ext" -out "$folder/$name.pem" 2>/dev/null
    rm "$folder/$name.csr" "$folder/$name.ext"
done
