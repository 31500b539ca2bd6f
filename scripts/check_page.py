"""Uses the page of `armt serve` as a person does, in a headless Chromium, and compares what it shows with the command's answers."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from playwright.sync_api import sync_playwright

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


def main(chromium: str, armt: str, pictures: str) -> None:
    root = pathlib.Path.cwd()
    model = root / "models/babilong-qa1"
    books = sorted((root / "data/books/test").iterdir())
    pictures = pathlib.Path(pictures)
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        book = pathlib.Path(folder) / "novel.txt"
        novel = books[0].read_text()
        book.write_text(f"Mary went to the kitchen. {novel} John moved to the garden. {novel[:200_000]}")
        other = pathlib.Path(folder) / "other.txt"
        other.write_text("Sandra went to the office. " * 20_000)
        memory = pathlib.Path(folder) / "novel.mem"
        run = lambda *words: subprocess.run([armt, *map(str, words)], check=True, capture_output=True, text=True).stdout
        run("read", model, book, "--memory", memory, "--device", "cpu")
        questions = ["Where is Mary?", "Where is John?"]
        expected = {q: run("ask", model, "--memory", memory, q, "--device", "cpu").strip() for q in questions}

        server = subprocess.Popen([armt, "serve", model, "--port", "0", "--device", "cpu"], stdout=subprocess.PIPE, text=True)
        try:
            address = re.search(r"http://\S+", server.stdout.readline()).group(0)
            with sync_playwright() as play:
                browser = play.chromium.launch(executable_path=chromium, args=QUIET)
                for name, scheme, size in [("light", "light", (1100, 900)), ("dark", "dark", (1100, 900)), ("phone", "light", (375, 800))]:
                    context = browser.new_context(color_scheme=scheme, viewport={"width": size[0], "height": size[1]})
                    page = context.new_page()
                    wrong = []
                    page.on("pageerror", lambda error: wrong.append(str(error)))
                    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
                    page.goto(address)
                    until(page, "document.getElementById('model').textContent !== 'armt'")
                    drop(page, book)
                    # Asked while it reads: some answer comes before the end.
                    until(page, "document.getElementById('bar').value > 0")
                    ask(page, questions[0])
                    until(page, "document.getElementById('status').textContent.endsWith('is read.')")
                    for question in questions:
                        answer = ask(page, question)
                        assert answer == expected[question], f"{question} {answer!r} on the page, {expected[question]!r} from armt ask"
                    assert page.text_content("#share") == "100 %"
                    tokens = page.text_content("#tokens")
                    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{name}: wider than the window"
                    page.screenshot(path=pictures / f"{name}.png", full_page=True)
                    page.click("#fork")
                    until(page, "document.getElementById('status').textContent.startsWith('A fork')")
                    with page.expect_download() as download:
                        page.click("#download")
                    assert download.value.path().stat().st_size > 90_000
                    # By keyboard alone: from the question's field to an answer.
                    page.focus("#question")
                    page.keyboard.type(questions[1])
                    before = page.locator("#answers li").count()
                    page.keyboard.press("Enter")
                    until(page, f"document.querySelectorAll('#answers li b').length > {before}")
                    for answer in ("dismiss", "accept"):
                        page.once("dialog", lambda dialog, answer=answer: getattr(dialog, answer)())
                        page.click("#delete")
                    until(page, "document.getElementById('status').textContent === 'Deleted.'")
                    assert not wrong, wrong
                    # A text that breaks off goes on where it ended when it is chosen again.
                    once = iter([True])
                    page.route("**/text?offset=262144", lambda route: route.abort() if next(once, False) else route.continue_())
                    drop(page, book)
                    until(page, "document.getElementById('status').textContent.includes('Choose the file again')")
                    drop(page, book)
                    until(page, "document.getElementById('status').textContent.endsWith('is read.')")
                    assert page.text_content("#tokens") == tokens, "read once"
                    # Where another text came in between, it is read as a whole.
                    page.select_option("#memories", "")
                    once = iter([True])
                    drop(page, book)
                    until(page, "document.getElementById('status').textContent.includes('Choose the file again')")
                    for path in [other, book]:
                        drop(page, path)
                        until(page, f"document.getElementById('status').textContent === '{path.name} is read.'")
                    id = page.input_value("#memories")
                    has = page.request.get(f"{address}/v1/memories/{id}").json()["text_bytes"]
                    assert has == 256 * 1024 + other.stat().st_size + book.stat().st_size, has
                    context.close()
                    print(f"{name}: read, asked, forked, downloaded, deleted, broken off and gone on")
                browser.close()
        finally:
            server.terminate()
            assert server.wait() == 0
        locked(chromium, [armt, "serve", model, "--port", "0", "--device", "cpu"], pathlib.Path(folder) / "keys")


def locked(chromium: str, command: list, keys: pathlib.Path) -> None:
    """A server with keys: the page asks for one, says which was wrong, and goes on with the right one."""
    keys.write_text("a-key-for-this-check\n")
    server = subprocess.Popen([*command, "--api-key-file", keys], stdout=subprocess.PIPE, text=True)
    try:
        address = re.search(r"http://\S+", server.stdout.readline()).group(0)
        with sync_playwright() as play:
            page = play.chromium.launch(executable_path=chromium, args=QUIET).new_page()
            page.goto(address)
            for key, said in [("another-key-of-a-server", "That is no key of this server."), ("a-key-for-this-check", "Nothing read yet.")]:
                until(page, "document.activeElement.id === 'key'")
                page.fill("#key", key)
                page.keyboard.press("Enter")
                until(page, f"document.getElementById('status').textContent === {said!r}")
            assert page.is_hidden("#locked") and page.get_attribute("#status", "class") == "soft"
            print("locked: a wrong key, the right one")
    finally:
        server.terminate()
        assert server.wait() == 0


def until(page, condition: str) -> None:
    """Waits for something to be true of the page. The page's policy lets nobody evaluate text in it, so it is asked from outside."""
    end = time.monotonic() + 180
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never came: {condition}; status {page.text_content('#status')!r}"
        page.wait_for_timeout(50)


def ask(page, question: str) -> str:
    before = page.locator("#answers li b").count()
    page.fill("#question", question)
    page.click("#send")
    until(page, f"document.querySelectorAll('#answers li b').length > {before}")
    return page.locator("#answers li b").first.text_content()


def drop(page, path: pathlib.Path) -> None:
    """A file dropped onto the page, as a mouse does it."""
    transfer = page.evaluate_handle(
        "([name, text]) => { const t = new DataTransfer(); t.items.add(new File([text], name, { type: 'text/plain', lastModified: 1 })); return t; }",
        [path.name, path.read_text()],
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main(*sys.argv[1:])
