from enum import Enum


class ToolBackend(Enum): DEFAULT = "DEFAULT"
