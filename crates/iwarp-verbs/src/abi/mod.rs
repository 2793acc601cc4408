//! The C structures of `infiniband/verbs.h` and `rdma/rdma_cma.h` for 64-bit systems: those of
//! rdma-core 44 with additions up to version 65. `recent` has the structures that are entirely new;
//! `kern` has the kernel's structures and the functions that copy them. This room uses no other.
//!
//! Structures that a program passes with a size or a mask may be longer here than in the program.
//! `verbs_context` begins with the fields of version 44: no inline function uses the later ones,
//! and `sz` says that they are missing.
//!
//! `c_struct!` also records every field's position for the layout test.
#![allow(non_camel_case_types, non_snake_case, missing_docs, reason = "C names")]

pub(crate) mod cma;
pub(crate) mod kern;
pub(crate) mod recent;
pub(crate) mod verbs;

pub(crate) type Field = (&'static str, usize, usize);

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
