"""What a session hears of saves, and of what is kept just in time."""


class Listener:
    def __init__(self) -> None:
        self.saved, self.failed, self.rescued = list[int](), list[tuple[int, int]](), list[int]()
        self.rescuable, self.part, self.is_rescuing = -1, 0, False

    def on_saved(self, step: int, _seconds: float) -> None:
        self.saved.append(step)

    def on_save_failed(self, step: int, number: int) -> None:
        self.failed.append((step, number))

    def on_rescuable(self, step: int) -> None:
        self.rescuable = step

    def on_rescuing(self, *, is_over: bool = False) -> None:
        self.is_rescuing = not is_over

    def on_rescued(self, step: int) -> None:
        self.rescued.append(step)

    def on_part(self, number: int) -> None:
        self.part = number

    def on_loaded(self, _seconds: float) -> None: ...
