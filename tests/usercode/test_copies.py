"""User code gets copies of the trainer's data, so its changes have no effect."""

from __future__ import annotations

import threading

import numpy as np
import torch
from PIL import Image
from tool_cases import Silent

from colograd.usercode.untrusted import own_copy


def test_data_is_copied_at_every_depth() -> None:
    image, array, tensor = Image.new("RGB", (2, 2)), np.zeros(2), torch.zeros(2)
    given = {"a": [{"b": (1, [2])}, {3}], "image": image, "array": array, "tensor": [tensor], "text": "t"}
    copied = own_copy(given)
    assert copied["a"] == given["a"] and copied["text"] is given["text"]
    copied["a"][0]["b"][1].append(4)
    copied["a"][1].add(4)
    copied["image"].putpixel((0, 0), (9, 9, 9))
    copied["array"][0] = copied["tensor"][0][0] = 9
    assert given["a"] == [{"b": (1, [2])}, {3}] and image.getpixel((0, 0)) == (0, 0, 0)
    assert array[0] == 0 and tensor[0] == 0


def test_objects_of_the_user_are_passed_on() -> None:
    lock, game = threading.Lock(), Silent()
    lines = (line for line in "ab")
    copied = own_copy([game, lock, lines, {"game": game}])
    assert copied[0] is game and copied[1] is lock and copied[2] is lines and copied[3]["game"] is game
