"""Stages by kind, each in a file that registers itself."""

from train.stage import STAGES
from train.stages import distill, feature_cache, generate, heads, online, teacher_cache

__all__ = ["STAGES", "distill", "feature_cache", "generate", "heads", "online", "teacher_cache"]
