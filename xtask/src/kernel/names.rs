//! Short names of functions, for people and for the list of exceptions.

/// The last two parts of a function's path, without generic arguments: `QueuePair::tx_fill`,
/// `plan::copy`. A copy that the compiler has made for some arguments has the function's name.
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

/// Takes out `::<…>` and the arguments of types. Of `<T as Trait>::f` it leaves `T::f`.
fn without_arguments(name: &str) -> String {
    let mut out = String::new();
    let mut rest = name;
    while let Some(at) = rest.find('<') {
        let (before, after) = rest.split_at(at);
        let end = closing(after);
        let (inner, behind) = (&after[1..end], after.get(end + 1..).unwrap_or_default());
        out.push_str(before);
        // At the beginning of a path it is a type, and after a name they are arguments.
        if before.is_empty() && out.is_empty() {
            let kind = inner.split(" as ").next().unwrap_or(inner);
            out.push_str(&without_arguments(kind.trim_start_matches(['&', '*'])));
        }
        rest = behind;
    }
    out.push_str(rest);
    out
}

/// Where the bracket that opens at the beginning is closed. An arrow is no bracket.
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
    fn types_stay_and_arguments_go() {
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
