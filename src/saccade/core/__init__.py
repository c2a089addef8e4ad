"""What everything else speaks of: errors, types, trees, laws, the verdict, options."""
