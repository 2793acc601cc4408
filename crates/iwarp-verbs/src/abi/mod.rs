//! The C structures of `infiniband/verbs.h` and `rdma/rdma_cma.h` for 64-bit systems: those of
//! rdma-core 44, with the fields that versions up to 65 added. `recent` contains the structures
//! that version 44 does not have; `kern` contains the kernel's structures and the functions that
//! copy them. This room uses no other room.
//!
//! Structures that a program passes with a size or a mask may be longer here than in the program.
//! `verbs_context` starts with the first field of version 44. No inline function uses fields that
//! were added in front of it later, and `sz` shows that they are missing.
#![allow(non_camel_case_types, non_snake_case, missing_docs, reason = "C names")]

pub(crate) mod cma;
pub(crate) mod kern;
pub(crate) mod recent;
pub(crate) mod verbs;

/// Name, offset and size of a field.
pub(crate) type Field = (&'static str, usize, usize);

/// The layout of a structure, for the comparison with the C headers.
#[cfg_attr(not(test), allow(dead_code, reason = "read by the layout test"))]
pub(crate) struct Layout {
    pub(crate) name: &'static str,
    pub(crate) size: usize,
    pub(crate) fields: &'static [Field],
}

macro_rules! c_structs {
    ($all:ident; $( $(#[$m:meta])* struct $name:ident [$size:expr] { $($f:ident: $t:ty,)* } )*) => {
        $(
            $(#[$m])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(crate) struct $name { $(pub(crate) $f: $t,)* }
            const _: () = assert!(size_of::<$name>() == $size);
        )*
        #[cfg_attr(not(test), allow(dead_code, reason = "read by the layout test"))]
        pub(crate) const $all: &[$crate::abi::Layout] = &[$(
            $crate::abi::Layout {
                name: stringify!($name),
                size: size_of::<$name>(),
                fields: &[$((
                    stringify!($f),
                    std::mem::offset_of!($name, $f),
                    {
                        const fn size<T>(_: fn(&$name) -> &T) -> usize { size_of::<T>() }
                        size(|s: &$name| &s.$f)
                    },
                ),)*],
            },
        )*];
    };
}
pub(crate) use c_structs;

#[cfg(test)]
mod layout_tests;
