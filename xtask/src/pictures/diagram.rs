//! The README's diagram: a program, our libraries, TCP, and the peers.

use std::fmt::Write as _;

use super::theme::Theme;

const WIDTH: u32 = 600;
const HEIGHT: u32 = 270;
const FONT: &str = "font-family=\"system-ui,-apple-system,'Segoe UI',sans-serif\"";

/// A box with a heading and a line below it.
struct Block {
    x: u32,
    y: u32,
    width: u32,
    heading: &'static str,
    line: &'static str,
    ours: bool,
}

const BLOCK_HEIGHT: u32 = 60;
const BLOCKS: &[Block] = &[
    Block {
        x: 12,
        y: 44,
        width: 264,
        heading: "unmodified program",
        line: "perftest, UCX, MPI, fio, …",
        ours: false,
    },
    Block {
        x: 12,
        y: 116,
        width: 264,
        heading: "libibverbs · librdmacm",
        line: "iwarp: a card as a library",
        ours: true,
    },
    Block {
        x: 12,
        y: 188,
        width: 264,
        heading: "TCP socket",
        line: "any network, any container",
        ours: false,
    },
    Block {
        x: 374,
        y: 44,
        width: 214,
        heading: "another iwarp",
        line: "here, or on another host",
        ours: true,
    },
    Block {
        x: 374,
        y: 116,
        width: 214,
        heading: "the kernel's siw",
        line: "NFS, NVMe-oF, iSER",
        ours: false,
    },
    Block {
        x: 374,
        y: 188,
        width: 214,
        heading: "our kernel module",
        line: "the same, in the kernel",
        ours: true,
    },
];

/// Returns the diagram as an SVG document.
pub(super) fn svg(theme: &Theme) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" {FONT}>\n\
         <title>A program uses iwarp's libraries, which use TCP to reach its peers</title>\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"8\" fill=\"{}\"/>\n",
        theme.background
    );
    caption(&mut out, theme, 12, "one process, an ordinary user");
    caption(&mut out, theme, 374, "peers");
    for block in BLOCKS {
        draw(&mut out, theme, block);
    }
    for (x, from, to) in [(144, 104, 116), (144, 176, 188)] {
        let _ = writeln!(
            out,
            "<path d=\"M{x} {from}V{to}\" stroke=\"{}\" stroke-width=\"2\"/>",
            theme.ink
        );
    }
    arrows(&mut out, theme);
    out + "</svg>\n"
}

fn caption(out: &mut String, theme: &Theme, x: u32, text: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x}\" y=\"30\" font-size=\"16\" fill=\"{}\">{text}</text>",
        theme.faint
    );
}

fn draw(out: &mut String, theme: &Theme, block: &Block) {
    let (fill, line) = match block.ours {
        true => (theme.accent_fill, theme.accent),
        false => (theme.fill, theme.line),
    };
    let middle = block.x + block.width / 2;
    let _ = writeln!(
        out,
        "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{BLOCK_HEIGHT}\" rx=\"6\" fill=\"{fill}\" \
         stroke=\"{line}\" stroke-width=\"1.5\"/>",
        block.x, block.y, block.width
    );
    for (below, size, colour, weight, text) in [
        (26, 19, theme.ink, 600, block.heading),
        (48, 16, theme.faint, 400, block.line),
    ] {
        let _ = writeln!(
            out,
            "<text x=\"{middle}\" y=\"{}\" font-size=\"{size}\" font-weight=\"{weight}\" \
             text-anchor=\"middle\" fill=\"{colour}\">{text}</text>",
            block.y + below
        );
    }
}

/// Draws the connection from the socket to the peers.
fn arrows(out: &mut String, theme: &Theme) {
    let line = format!(
        "stroke=\"{}\" stroke-width=\"2\" fill=\"none\"",
        theme.accent
    );
    let _ = writeln!(out, "<path d=\"M276 218H350M350 74V218\" {line}/>");
    for y in [74, 146, 218] {
        let head = y - 5;
        let _ = writeln!(out, "<path d=\"M350 {y}H370M363 {head}l8 5l-8 5\" {line}/>");
    }
    for (y, text) in [(208, "iWARP"), (238, "over TCP")] {
        let _ = writeln!(
            out,
            "<text x=\"314\" y=\"{y}\" font-size=\"16\" text-anchor=\"middle\" \
             fill=\"{}\">{text}</text>",
            theme.ink
        );
    }
}
