#!/usr/bin/env python3
"""The page of a precision report in a headless Chromium: what it draws, and what a reader can do with it.

    page_test.py --made-by PROGRAM      PROGRAM --gtest_filter=Page.WritesPages writes *.html to SEMITONE_PAGE_DIR
    page_test.py --page FILE

The tests read these pages as they are, and put reports of their own into the first of them. Exit code 77: no Chromium.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import page_reports
from browser import Browser, find_chromium

DATA = re.compile(r'(<script type="application/json" id="report">)(.*?)(</script>)', re.DOTALL)
# Contrasts below 4.5 of texts with what is behind them, as "contrast: text".
LOW_CONTRASTS = """(() => {
  const channels = (color) => { const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    context.fillStyle = color; context.fillRect(0, 0, 1, 1); return [...context.getImageData(0, 0, 1, 1).data]; };
  const luminance = (color) => channels(color).slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4).reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (node) => node === null ? "white" : channels(getComputedStyle(node).backgroundColor)[3] === 255
    ? getComputedStyle(node).backgroundColor : behind(node.parentElement);
  const low = new Set();
  for (const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT); walker.nextNode();) {
    const node = walker.currentNode.parentElement;
    if (walker.currentNode.data.trim() && !node.closest("script, noscript, option") && node.checkVisibility()) {
      const style = getComputedStyle(node);
      const [one, other] = [luminance(node.closest("svg") ? style.fill : style.color), luminance(behind(node))];
      const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
      contrast < 4.5 && low.add(contrast.toFixed(1) + ": " + walker.currentNode.data.slice(0, 30));
    }
  }
  return [...low];
})()"""


def made_pages(words):
    """The pages to test, by name, and what keeps them."""
    folder = tempfile.TemporaryDirectory()
    if len(words) == 2 and words[0] == "--page":
        return {words[1]: pathlib.Path(words[1]).read_text()}, folder
    if len(words) != 2 or words[0] != "--made-by":
        sys.exit(__doc__)
    subprocess.run([words[1], "--gtest_filter=Page.WritesPages", "--gtest_brief=1"], check=True, timeout=600,
                   env={**os.environ, "SEMITONE_PAGE_DIR": folder.name})
    return {path.name: path.read_text() for path in sorted(pathlib.Path(folder.name).glob("*.html"))}, folder


class PageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = Browser(CHROMIUM)
        cls.addClassCleanup(cls.browser.close)

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def show(self, report, **view):
        """Opens a page that has this report, and fails if the page complains."""
        data = json.dumps(report).replace("<", "\\u003c")
        self.open(DATA.sub(lambda match: match[1] + data + match[3], next(iter(PAGES.values())), count=1), **view)
        self.assertEqual(self.browser.problems, [])

    def open(self, text, **view):
        page = self.folder / "page.html"
        page.write_text(text)
        self.browser.open(page, **view)

    def ask(self, expression):
        return self.browser.evaluate(expression)

    def texts(self, selector):
        return self.ask(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")

    def count(self, selector):
        return self.ask(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector, index=0):
        self.ask(f"document.querySelectorAll({json.dumps(selector)})[{index}].click()")

    def enter(self, selector, value, event="input"):
        self.ask(f"{{ const one = document.querySelector({json.dumps(selector)}); one.value = {json.dumps(value)}; one.dispatchEvent(new Event('{event}')); }}")

    def fates(self):
        texts = (text.replace("\u202f", " ") for text in self.texts(".fates li"))
        return dict(reversed(re.match(r"(.*%) (.*)", text).groups()) for text in texts if "%" in text)

    def test_pages_of_the_program_are_whole(self):
        self.assertGreater(len(PAGES), 0)
        for name, text in PAGES.items():
            with self.subTest(name):
                self.assertEqual(len(DATA.findall(text)), 1)
                for mark in ("<!--CSS-->", "<!--DATA-->", "<!--JS-->"):
                    self.assertNotIn(mark, text)
                self.open(text)
                self.assertEqual(self.browser.problems, [])
                self.assertEqual(self.count("h1"), 2 if json.loads(DATA.search(text)[2]).get("compare") else 1)

    def test_the_first_screen_says_why_a_step_was_skipped_and_what_to_change(self):
        self.show(page_reports.run())
        below = self.ask("[...document.querySelectorAll('.card')].map((card) => card.getBoundingClientRect().bottom)")
        self.assertLess(max(below), 800)
        first = self.texts(".card")[0]
        for words in ("Problem", "6.4 %", "Step 312 was skipped", "What to change: Start with a lower loss scale", "conv2.weight", "Step 312"):
            self.assertIn(words, first.replace("\u202f", " "))

    def test_charts_are_drawn_and_say_what_they_show(self):
        self.show(page_reports.run())
        self.assertGreater(self.count(".timeline path"), 5)
        self.assertEqual(self.ask("document.querySelector('.skipped-mark').getAttribute('d').match(/M/g).length"), 2)
        self.assertGreater(self.count(".histogram path.values"), 1)
        self.assertGreater(self.count(".heat-map path.heat"), 1)
        self.assertEqual(self.ask("[...document.querySelectorAll('.chart > svg')].filter((one) => !one.getAttribute('aria-label')).length"), 0)
        self.assertIn("skipped steps: 12, 312", self.ask("document.querySelector('.timeline svg').getAttribute('aria-label')"))
        self.assertFalse(self.ask("[...document.querySelectorAll('svg *')].some((one) => [...one.attributes].some(({value}) => /NaN|Infinity|undefined/.test(value)))"))
        self.assertEqual(self.texts(".limit-name"), ["largest of float16", "smallest normal of float16", "smallest of float16"])
        self.assertIn("limits for loss scale 2¹⁶", "".join(self.texts(".histogram .tick")))  # step 312 lowered it, after its backward

    def test_skipped_steps_have_only_the_changes_of_their_own_step(self):
        report = page_reports.run()
        report["skipped"].insert(1, {**report["skipped"][0], "step": 200, "exact": False, "loss_scale": 65536.0, "scale_after": None})
        self.show(report)
        table = "[...document.querySelectorAll('table')].find((one) => one.textContent.includes('Changed to'))"
        self.assertEqual(self.ask(f"[...{table}.querySelectorAll('tbody tr')].map((row) => row.lastElementChild.textContent)"), ["2¹⁵", "–", "2¹⁶"])
        self.assertEqual(self.texts("#timeline tbody th"), ["312", "up to 200", "12"])

    def test_the_pointer_reads_a_step(self):
        self.show(page_reports.run())
        self.ask("""{ const area = document.querySelector(".pointer"), box = area.getBoundingClientRect();
          area.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width * 12 / 312 + 2})); }""")
        self.assertEqual(self.texts(".readout"), ["step 12  ·  loss 2.44  ·  loss scale 2¹⁷  ·  skipped"])
        self.ask("document.querySelector('.pointer').dispatchEvent(new PointerEvent('pointerleave'))")
        self.assertEqual(self.texts(".readout"), [""])

    def test_the_shares_are_those_of_the_report(self):
        report = page_reports.run()
        report["parameters"][0]["shares"]["float16"] = {"zero": 0.26, "subnormal": 0.5, "overflow": 0.015}
        self.show(report)
        fates = self.fates()
        self.assertEqual(fates["rounds to zero"], "26.0 %")
        self.assertEqual(fates["subnormal: fewer bits"], "50.0 %")
        self.assertEqual(fates["overflows to inf"], "1.50 %")
        self.assertEqual(fates["full precision"], "22.5 %")

    def test_shares_that_sum_to_one_leave_nothing(self):
        report = page_reports.run()
        report["parameters"][0]["shares"]["float16"] = {"zero": 0.9, "subnormal": 0.1, "overflow": 0}
        report["parameters"][0]["weight"] = page_reports.histogram(-6, [1] * 6)
        self.show(report)
        self.assertEqual(self.fates()["full precision"], "0 %")
        self.click(".segments button", 1)
        self.assertEqual(self.fates()["full precision"], "100 %")

    def test_gradients_with_several_scales_have_no_shares(self):
        report = page_reports.run()
        for one in report["parameters"]:
            one["shares"] = None
        self.show(report)
        legend = " ".join(self.texts(".fates li"))
        self.assertIn("– full precision", legend)
        self.assertIn("several loss scales: try one of them", legend)
        self.enter(".slider input", "16")
        self.assertEqual(self.fates()["rounds to zero"], "25.0 %")

    def test_the_scale_of_a_sample_moves_the_limits_without_recorded_changes(self):
        report = {**page_reports.run(), "loss_scale": [], "skipped": []}
        for one in report["parameters"]:
            if one["gradient"]:
                one["gradient"]["loss_scale"] = 65536.0
        self.show(report)
        self.assertIn("limits for loss scale 2¹⁶", "".join(self.texts(".histogram .tick")))

    def test_a_single_loss_is_a_point_and_nan_is_a_gap(self):
        loss = "document.querySelector('.timeline path.loss').getAttribute('d')"
        self.show({**page_reports.run(), "loss": [[10, 2.5]]})
        self.assertRegex(self.ask(loss), r"^M\S+ \S+h0$")
        many = [[step, None if 1000 <= step < 2000 else 2 + step % 7] for step in range(3000)]
        self.show({**page_reports.run(), "loss": many})
        self.assertEqual(self.ask(f"{loss}.match(/M/g).length"), 2)

    def test_labels_tell_steps_and_losses_apart(self):
        report = page_reports.run()
        report["run"]["steps"] = 3
        report["loss"] = [[step, 2.3005 + step / 750] for step in range(4)]
        report["loss_scale"], report["skipped"] = [], []
        self.show(report)
        ticks = self.texts(".timeline .tick")
        self.assertEqual(len(ticks), len(set(ticks)))
        self.assertEqual(ticks[-4:], ["0", "1", "2", "3"])
        report = page_reports.run()
        report["run"]["steps"] = 1300000
        report["skipped"] = [{**report["skipped"][1], "step": step} for step in (1234567, 1234999)]
        report["verdicts"][0]["steps"] = [1234567, 1234999]
        self.show(report)
        self.assertIn("Steps 1,234,567, 1,234,999", self.texts(".card")[0])
        self.assertEqual(self.texts("#timeline tbody th"), ["1,234,999", "1,234,567"])

    def test_another_loss_scale_moves_the_limits(self):
        self.show(page_reports.run())
        before = self.ask("document.querySelector('.limit').getAttribute('d')")
        self.enter(".slider input", "31")
        self.assertNotEqual(self.ask("document.querySelector('.limit').getAttribute('d')"), before)
        for exponent, share in (("31", "0 %"), ("16", "25.0 %"), ("15", "50.0 %")):  # half of the smallest value rounds up
            self.enter(".slider input", exponent)
            self.assertEqual(self.fates()["rounds to zero"], share)
        self.click(".reset")
        self.assertEqual(self.ask("document.querySelector('.limit').getAttribute('d')"), before)

    def test_a_chosen_name_changes_the_histogram(self):
        self.show(page_reports.run())
        self.assertEqual(self.texts(".chosen-name"), ["conv1.weight"])  # the one that loses most
        before = self.ask("document.querySelector('.histogram').innerHTML")
        self.click(".names button", 2)
        self.assertEqual(self.texts(".chosen-name"), ["fc.weight"])
        self.assertNotEqual(self.ask("document.querySelector('.histogram').innerHTML"), before)
        self.ask("document.querySelector('.heat-row').dispatchEvent(new MouseEvent('click'))")
        self.assertEqual(self.texts(".chosen-name"), ["conv1.weight"])
        self.click(".chip")
        self.assertEqual(self.texts(".chosen-name"), ["conv2.weight"])
        self.enter(".chooser input", "FC")
        self.assertEqual(self.ask("[...document.querySelectorAll('.names button')].map((one) => one.title)"), ["fc.weight"])

    def test_outputs_and_weights_are_shown_likewise(self):
        self.show(page_reports.run())
        for index, name in enumerate(["conv1.weight", "conv1.weight", "conv1", "conv1"]):
            self.click(".segments button", index)
            self.assertEqual(self.texts(".chosen-name"), [name])
            self.assertGreater(self.count(".histogram path.values"), 0)
            self.assertEqual(self.ask("document.querySelector('.slider').checkVisibility()"), index in (0, 3))

    def test_tables_are_sorted_by_their_headers(self):
        self.show(page_reports.run())
        names = "#operators tbody th"
        sorted_by = "[...document.querySelectorAll('#operators th[scope=col]')].map((one) => one.getAttribute('aria-sort')).filter((one) => one !== 'none')"
        self.assertEqual(self.texts(names), ["conv2d", "addmm", "_to_copy", "relu"])  # the slowest first
        self.assertEqual(self.ask(sorted_by), ["descending"])
        self.click("#operators thead button")
        self.assertEqual(self.texts(names), sorted(self.texts(names), key=str.lower))
        self.assertEqual(self.ask(sorted_by), ["ascending"])
        self.click("#operators thead button")
        self.assertEqual(self.ask(sorted_by), ["descending"])
        self.click("#updates thead button", 1)
        self.assertEqual(self.texts("#updates tbody th")[-1], "fc.weight")  # has no ratio

    def test_operators_are_filtered(self):
        self.show(page_reports.run())
        self.enter("#operators input", "CONV")
        self.assertEqual(self.texts("#operators tbody th"), ["conv2d"])
        self.enter("#operators input", "")
        self.enter("#operators select", "backward", "change")
        self.assertEqual(self.texts("#operators tbody th"), ["addmm"])
        self.enter("#operators input", "relu")
        self.assertIn("Nothing matches.", self.texts("#operators tbody td"))

    def test_names_of_a_verdict_show_what_they_stand_for(self):
        report = page_reports.run()
        report["verdicts"][0]["where"] = ["fc.weight", "addmm", "elsewhere"]
        self.show(report)
        self.assertEqual(self.ask("[...document.querySelectorAll('.chip')].slice(0, 3).map((one) => one.tagName)"), ["BUTTON", "BUTTON", "SPAN"])
        self.click(".chip")
        self.assertEqual(self.texts(".chosen-name"), ["fc.weight"])
        self.click(".chip", 1)
        self.assertEqual(self.texts("#operators tbody th"), ["addmm"])

    def test_two_runs_share_their_axes(self):
        other = page_reports.run(directory="runs/8", exponent=-70)
        other["loss"] = [[step, 40.0] for step in range(100)]
        self.show({**page_reports.run(), "compare": other})
        self.assertEqual(self.texts("h1 > span:first-child"), ["runs/7", "runs/8"])
        for chart in (".timeline", ".histogram", ".heat-map"):
            first, second = self.ask(f"[...document.querySelectorAll('{chart}')].map((one) => [...one.querySelectorAll('.tick')].map((tick) => tick.textContent))")
            self.assertEqual(first, second, chart)
        outside = "[...document.querySelectorAll('.values, .heat')].map((one) => one.getBBox()).filter((box) => box.width > 0 && box.x < 50).length"
        self.assertEqual(self.ask(outside), 0)
        self.assertEqual(sorted(set(self.texts("#operators tbody td:nth-child(2)"))), ["runs/7", "runs/8"])

    def test_runs_with_little_to_show(self):
        for report in (page_reports.without_samples(), page_reports.empty(), {**page_reports.run(), "compare": page_reports.empty()}):
            self.show(report)
            self.assertEqual(self.count("#run"), 1)

    def test_data_are_text(self):
        hostile = "</script><img src=x onerror=\"document.title='broken'\">'\"&amp;"
        self.show(page_reports.renamed(page_reports.run(), hostile))
        self.assertEqual(self.count("img"), 0)
        self.assertNotIn("broken", self.ask("document.title.replace(/.*<img.*/, '')"))
        self.assertIn(hostile, self.ask("[...document.querySelectorAll('.names button')].map((one) => one.title)"))

    def test_a_report_of_another_version_is_refused(self):
        text = DATA.sub(lambda match: match[1] + '{"format": "semitone-report", "version": 2}' + match[3], next(iter(PAGES.values())), count=1)
        self.open(text)
        self.assertIn("expected a semitone-report of version 1", self.texts(".message")[0])

    def test_a_phone_does_not_scroll_sideways(self):
        for report in (page_reports.run(), page_reports.large(), {**page_reports.run(), "compare": page_reports.run(directory="runs/8")}):
            self.show(report, width=390, height=844)
            self.assertLessEqual(self.ask("document.documentElement.scrollWidth"), 390)

    def test_many_layers_are_drawn(self):
        self.show(page_reports.large())
        self.assertEqual(self.count(".heat-row"), 160)
        self.assertEqual(self.count("#values tbody tr"), 12)
        self.click("#values .more")
        self.assertEqual(self.count("#values tbody tr"), 160)

    def test_texts_are_readable_in_light_and_dark(self):
        for scheme in ("light", "dark"):
            self.show(page_reports.run(), scheme=scheme)
            self.assertEqual(self.ask(LOW_CONTRASTS), [], scheme)

    def test_paper_has_charts_and_no_controls(self):
        self.show(page_reports.run(), width=720, media="print")
        self.assertEqual(self.ask("[...document.querySelectorAll('nav, input, select, .more')].filter((one) => one.checkVisibility()).length"), 0)
        self.assertGreater(self.count(".chart svg"), 4)
        self.assertGreater(len(self.browser.call("Page.printToPDF")["data"]), 10000)
        self.assertEqual(self.browser.problems, [])


if __name__ == "__main__":
    CHROMIUM = find_chromium()
    if CHROMIUM is None:
        print("no Chromium on this machine")
        sys.exit(77)
    PAGES, KEPT = made_pages(sys.argv[1:])
    unittest.main(argv=sys.argv[:1])
