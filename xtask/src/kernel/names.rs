//! Short names of functions, for messages and for the list of exceptions.

/// Returns the last two parts of a function's path, without generic arguments:
/// `QueuePair::tx_fill`, `plan::copy`. Also removes the number that the compiler appends to the
/// name of a specialised copy.
pub(crate) fn short(symbol: &str) -> String {
    let name = last_two(&format!("{:#}", rustc_demangle::demangle(symbol)));
    match name.rsplit_once('.') {
        Some((plain, number)) if number.chars().all(|c| c.is_ascii_digit()) => plain.to_owned(),
        _ => name,
    }
}

fn last_two(name: &str) -> String {
    let plain = without_arguments(name);
    let parts: Vec<&str> = plain.split("::").filter(|part| !part.is_empty()).collect();
    parts[parts.len().saturating_sub(2)..].join("::")
}

/// Removes `::<…>` and the arguments of types. `<T as Trait>::f` becomes `T::f`.
fn without_arguments(name: &str) -> String {
    let mut out = String::new();
    let mut rest = name;
    while let Some(at) = rest.find('<') {
        let (before, after) = rest.split_at(at);
        let end = closing(after);
        let (inner, behind) = (&after[1..end], after.get(end + 1..).unwrap_or_default());
        out.push_str(before);
        // Angle brackets contain a type at the beginning of a path, and arguments after a name.
        if before.is_empty() && out.is_empty() {
            let kind = inner.split(" as ").next().unwrap_or(inner);
            out.push_str(&without_arguments(kind.trim_start_matches(['&', '*'])));
        }
        rest = behind;
    }
    out.push_str(rest);
    out
}

/// Returns the offset at which the bracket at the beginning is closed. Ignores arrows (`->`).
fn closing(text: &str) -> usize {
    let mut depth = 0;
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        match c {
            '<' => depth += 1,
            '>' if before != '-' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
        before = c;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_arguments_are_removed() {
        for (name, wanted) in [
            ("rk_post_send", "rk_post_send"),
            ("core::panicking::panic_fmt", "panicking::panic_fmt"),
            ("<a::qp::QueuePair>::step::<b::Owner>", "QueuePair::step"),
            (
                "<alloc::raw_vec::RawVec<(usize, a::Milestone)>>::grow_one",
                "RawVec::grow_one",
            ),
            ("<a::Span as core::fmt::Debug>::fmt", "Span::fmt"),
            ("<a::Span<fn() -> u8> as b::T<u8>>::f::<x>", "Span::f"),
            ("a::b::c::{closure#0}", "c::{closure#0}"),
        ] {
            assert_eq!(last_two(name), wanted);
        }
    }

    #[test]
    fn symbols_are_demangled() {
        assert_eq!(
            short("_RNvMNtCs1234_4core6optionINtB2_6OptionhE6unwrapB4_"),
            "Option::unwrap"
        );
        assert_eq!(
            short("_RNvMNtCs1234_4core6optionINtB2_6OptionhE6unwrapB4_.88"),
            "Option::unwrap"
        );
    }
}
