"""The machinery under the lessons: what their cells call, and what builds, runs and checks their notebooks."""

from minipaged.lessons.kit import NotYet, WrongAnswer, ask, exercise, expect, lesson_model, show

__all__ = ["NotYet", "WrongAnswer", "ask", "exercise", "expect", "lesson_model", "show"]
