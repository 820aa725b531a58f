//! The report as one HTML file without references to others.

use std::fmt::Write;

use anyhow::Result;

use super::figures::figures;
use super::plot::{AXIS, INK, MESH, PAGE};
use super::report::{Failed, Mode, Report, Table};
use plotters::style::RGBColor;

/// The whole file.
pub fn page(report: &Report) -> Result<String> {
    let title = match report.mode {
        Mode::Prefill => "GroupQueryAttention: prefill",
        Mode::Decode => "GroupQueryAttention: decode",
    };
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{}\n{}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n",
        include_str!("report.css"),
        dark_figures(),
    );
    writeln!(html, "<p class=\"lead\">{}</p>", escape(&report.provenance.headline()))?;
    results(&mut html, report)?;
    for figure in figures(report) {
        writeln!(
            html,
            "<figure>\n{}</figure>",
            figure.svg()?.replacen(
                "<svg ",
                &format!("<svg role=\"img\" aria-label=\"{}\" ", escape(&figure.title)),
                1
            )
        )?;
    }
    origin(&mut html, report)?;
    html.push_str("</main>\n</body>\n</html>\n");
    Ok(html)
}

/// The results, the same beside others, and what could not be measured.
fn results(html: &mut String, report: &Report) -> Result<()> {
    table(html, &Table::results(report.mode, &report.results))?;
    for kernels in report.kernels() {
        writeln!(html, "<p class=\"detail\">{}</p>", escape(&kernels))?;
    }
    if let Some(note) = report.note_of_roofline() {
        writeln!(html, "<p class=\"detail\">Roofline: {}.</p>", escape(note))?;
    }
    if let Some(beside) = Table::side_by_side(report.mode, &report.results) {
        html.push_str("<h2>Beside others</h2>\n");
        table(html, &beside)?;
    }
    for Failed { call, reason } in &report.failed {
        writeln!(
            html,
            "<p class=\"failed\">Not measured: {}: {}</p>",
            escape(call),
            escape(reason)
        )?;
    }
    html.push_str(NOTES);
    Ok(())
}

fn table(html: &mut String, table: &Table) -> Result<()> {
    html.push_str("<div class=\"scroll\"><table>\n");
    for (number, row) in table.rows.iter().enumerate() {
        let (open, cell, close) = match number {
            0 => ("<thead><tr>", "th", "</tr></thead>\n<tbody>"),
            _ => ("<tr>", "td", "</tr>"),
        };
        html.push_str(open);
        for (text, number) in row.iter().zip(&table.numbers) {
            let class = if *number { " class=\"number\"" } else { "" };
            write!(html, "<{cell}{class}>{}</{cell}>", escape(text))?;
        }
        writeln!(html, "{close}")?;
    }
    html.push_str("</tbody></table></div>\n");
    Ok(())
}

const NOTES: &str = "<p class=\"note\">Median over the timed runs, with the tenth and the ninetieth percentile. On a GPU calls are replayed \
from a CUDA graph that walks over several sets of buffers, so that no call finds its inputs in the L2 cache. TFLOP/s counts the \
multiplications and additions of q·k and p·v that the mask leaves; GB/s counts what must be read or written once. Roofline: the least time \
by the ceilings below over the median. CPU: processor time of a call, on a GPU to put it into the stream without a graph. Check: sampled \
rows of this run's output and cache against the f64 reference, and the largest difference. Ratios to others: their time over ours.</p>\n";

/// Ceilings and provenance.
fn origin(html: &mut String, report: &Report) -> Result<()> {
    html.push_str("<h2>Where the numbers come from</h2>\n<dl>\n");
    let mut lines: Vec<(String, String)> = report
        .provenance
        .lines()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    if let Some(ceilings) = &report.ceilings {
        let rate = |name: &str, value: f64, unit: &str, source: &str| {
            (name.to_owned(), format!("{value:.1} {unit} ({source})"))
        };
        let tera = |rate: &super::ceiling::Rate| rate.per_second * 1e-12;
        lines.push(rate(
            "Memory",
            ceilings.memory.per_second * 1e-9,
            "GB/s",
            &ceilings.memory.source,
        ));
        lines.push(rate(
            "Arithmetic, 16-bit",
            tera(&ceilings.half),
            "TFLOP/s",
            &ceilings.half.source,
        ));
        lines.push(rate(
            "Arithmetic, float32",
            tera(&ceilings.single),
            "TFLOP/s",
            &ceilings.single.source,
        ));
    }
    lines.extend(
        report.peers.iter().map(|(name, value)| (format!("Others: {name}"), value.clone())),
    );
    for (name, value) in lines {
        writeln!(html, "<dt>{}</dt><dd>{}</dd>", escape(&name), escape(&value))?;
    }
    html.push_str("</dl>\n");
    Ok(())
}

/// On a dark page the figures' fixed colours are exchanged; paper is white.
fn dark_figures() -> String {
    let hex = |RGBColor(r, g, b): RGBColor| format!("#{r:02X}{g:02X}{b:02X}");
    format!(
        "@media screen and (prefers-color-scheme: dark) {{\n  figure [fill=\"{}\"] {{ fill: none; }}\n  figure [fill=\"{ink}\"] {{ fill: #e6e9ed; }}\n  \
         figure [stroke=\"{ink}\"] {{ stroke: #e6e9ed; }}\n  figure [stroke=\"{}\"] {{ stroke: #8b949e; }}\n  \
         figure [stroke=\"{}\"] {{ stroke: #2c333b; }}\n}}\n",
        hex(PAGE),
        hex(AXIS),
        hex(MESH),
        ink = hex(INK),
    )
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            c => escaped.push(c),
        }
    }
    escaped
}
