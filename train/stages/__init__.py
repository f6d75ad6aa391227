"""Stages by kind, each in a file that registers itself."""

from train.stage import STAGES
from train.stages import distill, generate, online, teacher_cache

__all__ = ["STAGES", "distill", "generate", "online", "teacher_cache"]
