"""Stages by kind, each in a file that registers itself."""

from train.stage import STAGES
from train.stages import distill, generate, heads, teacher_cache

__all__ = ["STAGES", "distill", "generate", "heads", "teacher_cache"]
