#!/usr/bin/env python3
# Changes the manifest of an image, the way a faulty or malicious writer would. Needs Python 3.8 and nothing else.
#   edit_image.py IMAGE sealed OLD NEW     the first OLD of the manifest becomes NEW, of the same length; the seal is made anew
#   edit_image.py IMAGE unsealed OLD NEW   the seal stays
import hashlib
import json
import struct
import sys


def main():
    path, how, old, new = sys.argv[1:]
    with open(path, "rb") as file:
        image = bytearray(file.read())
    h = struct.unpack("<Q", image[:8])[0]
    header = json.loads(image[8:8 + h])
    begin, end = (8 + h + at for at in header["__k3pack__"]["data_offsets"])
    seal, seal_end = (8 + h + at for at in header["__seal__"]["data_offsets"])
    at = bytes(image[begin:end]).find(old.encode())
    if at < 0 or len(old) != len(new):
        sys.exit("not in the manifest, or of another length: " + old)
    image[begin + at:begin + at + len(new)] = new.encode()
    if how == "sealed":
        image[seal:seal_end] = hashlib.sha256(bytes(image[:seal])).digest()
    with open(path, "wb") as file:
        file.write(image)


if __name__ == "__main__":
    main()
